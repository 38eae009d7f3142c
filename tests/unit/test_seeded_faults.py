"""The faults that `make mutation` seeds are still in the sources, and so are the files of tests that catch them."""

import pytest

from tests.tools.mutation import ROOT, SEEDED, home_of


@pytest.mark.parametrize("fault", SEEDED, ids=lambda fault: fault.name)
def test_its_text_stands_once_and_its_tests_exist(fault):
    assert (ROOT / home_of(fault)).read_text("utf-8").count(fault.old) == 1
    assert all((ROOT / name).is_file() for name in fault.tests.split())
