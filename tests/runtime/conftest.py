"""The finished working folders of the end-to-end tests serve here too."""

from tests.e2e.conftest import deepseek_path, mixtral_path

__all__ = ["deepseek_path", "mixtral_path"]
