"""What `import neuclip` offers, and what it must not import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import neuclip
from neuclip.objectives import OBJECTIVES


def test_importing_the_package_imports_no_torch():
    environment = {**os.environ, "PYTHONPATH": str(Path(neuclip.__file__).parents[1])}
    code = "import sys, neuclip; dir(neuclip); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "False\n"


def test_every_public_name_is_there_and_listed_and_the_objectives_are_themselves():
    for name in neuclip.__all__:
        assert getattr(neuclip, name) is not None
        assert name in dir(neuclip)
    assert [getattr(neuclip, kind.__name__) for kind in OBJECTIVES.values()] == [*OBJECTIVES.values()]


@pytest.mark.parametrize("name", ["nothing", "_private"])
def test_an_unknown_name_is_an_attribute_error(name):
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'; it has .*NeuCLIP"):
        getattr(neuclip, name)
