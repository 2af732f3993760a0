"""Licenses of published weights."""

import pytest

from clip_moe.conversion.publishing.card import require_license


@pytest.mark.parametrize("license", ["Apache 2.0", "apache", "MIT", "other", "other: ", "", "mit\nbase_model: x"])
def test_a_license_that_the_hub_does_not_know_is_refused(license):
    with pytest.raises(ValueError, match="none of the Hub's") as error:
        require_license(license)
    assert "\n" not in str(error.value)
    assert license != "Apache 2.0" or "did you mean 'apache-2.0'?" in str(error.value)


def test_licenses_of_a_card():
    assert require_license(None) == {} and require_license("mit") == {"license": "mit"}
    assert require_license("other:my-terms") == {"license": "other", "license_name": "my-terms"}
