"""The packages that some worlds are drawn from."""

from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of the packages that are installed."""
    versions = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = distribution(package).version
    return versions


def require_packages(world: str, packages: Iterable[str], way_out: str) -> None:
    """Raises a ValueError with the way out if a world's package is missing."""
    installed = installed_versions(packages)
    if missing := [package for package in packages if package not in installed]:
        raise ValueError(f"{world} need {missing[0]}, which is not installed: {way_out}")
