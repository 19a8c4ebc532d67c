"""The learner's models serve these tests too."""

from tests.learner.conftest import policy_dir as policy_dir
