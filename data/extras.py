"""The packages of extras, from which some worlds are drawn."""

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


def require_extra(world: str, packages: Iterable[str]) -> None:
    """Raises a ValueError if a package is missing of the extra that is called as its world."""
    installed = installed_versions(packages)
    if missing := [package for package in packages if package not in installed]:
        raise ValueError(f"{world} need {missing[0]}, which is not installed: pip install -e '.[{world}]'")
