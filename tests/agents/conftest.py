"""The endpoint's fixtures serve the recorder's tests too."""

from tests.serve.conftest import renderer as renderer
