"""A rank in whose process something is planted. Importing the tests there would take seconds."""

import os  # noqa: F401 (what is planted uses it)
import time  # noqa: F401

from nanoengine.extensions.parallel import tensor_parallel as parallel


def serve_after(code, *arguments):
    exec(code)
    parallel.serve(*arguments)
