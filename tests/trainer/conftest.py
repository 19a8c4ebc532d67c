"""The learner's models serve these tests too."""

from tests.learner.conftest import policy_dir as policy_dir
from tests.learner.conftest import reference_dir as reference_dir
