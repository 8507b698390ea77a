"""
The first file of the processes that [`python_process`] starts. It gets its settings as JSON, the way of working and its
arguments, and is itself independent of everything but the standard library.
"""

import importlib
import importlib.metadata
import io
import json
import linecache
import os
import re
import sys
import traceback
from importlib.machinery import PathFinder


def hide(modules, distributions):
    """Have Python find neither these top-level modules nor these distributions, as if they were not installed."""

    class Finder(PathFinder):
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            return None if name.partition(".")[0] in modules else super().find_spec(name, path, target)

        @classmethod
        def find_distributions(cls, *args, **kwargs):
            for found in super().find_distributions(*args, **kwargs):
                if re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower() not in distributions:
                    yield found

    sys.meta_path[sys.meta_path.index(PathFinder)] = Finder


def raised(function, *args, **kwargs):
    """What a call raises, as values: names of the class and its bases, message, HTTP status. `None` if it returns."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        response = getattr(error, "response", None)
        types = [cls.__name__ for cls in type(error).__mro__]
        return {"types": types, "message": str(error), "status": getattr(response, "status_code", None)}
    return None


def execute(code, variables):
    """Run `code` with `variables` and [`raised`] as its globals, and return them."""
    linecache.cache["<code>"] = (len(code), None, code.splitlines(keepends=True), "<code>")  # for tracebacks
    names = {"__name__": "__main__", "raised": raised, **variables}
    exec(compile(code, "<code>", "exec"), names)
    return names


def serve():
    """One line of JSON in, one out, for each piece of code; what the code prints goes to the error stream."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = {"result": execute(asked["code"], asked["variables"]).get("result")}
            json.dumps(answer)
        except BaseException:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


def main():
    settings, mode, *arguments = sys.argv[1:]
    settings = json.loads(settings)
    if settings["is_bare"]:
        sys.path.extend(settings["path"])
        hide(set(settings["modules"]), set(settings["distributions"]))
        for name in settings["project"]:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError:
                continue
            sys.exit(
                f"{name} is importable, from {sys.modules[name].__file__}: nothing said here would hold without it"
            )
    else:
        del sys.path[0]  # the folder of this file: tests are no part of what is installed
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    if mode == "serve":
        return serve()
    sys.argv[:] = ["-c", *arguments]
    execute(mode, {})


if __name__ == "__main__":
    main()
