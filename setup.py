"""What pyproject.toml cannot say: the top-level package ``diagnostics`` is installed as a name alone."""

from setuptools import setup
from setuptools.command.build_py import build_py


class OneCopy(build_py):
    """Installs of ``diagnostics`` the ``__init__`` only, which makes it a name of ``fedlayers.diagnostics``."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """The modules of a package, as (package, module, file)."""
        modules = super().find_package_modules(package, package_dir)
        return [each for each in modules if package != "diagnostics" or each[1] == "__init__"]


setup(cmdclass={"build_py": OneCopy})
