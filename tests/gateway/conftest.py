"""One server for the tests that need no other configuration."""

from tests.doors import serving

served = serving(scope="package", pass_s=0.003)
