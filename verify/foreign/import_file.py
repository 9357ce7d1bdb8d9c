"""A stranger's file as a module."""

import importlib.util
import sys


def import_file(path):
    """The file as a module; its folder is importable, as it would be if it were run as a script."""
    name = f"verify_foreign_{path.stem.replace('-', '_')}"
    found = importlib.util.spec_from_file_location(name, path.absolute())
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    sys.path.insert(0, str(path.absolute().parent))
    found.loader.exec_module(module)
    return module
