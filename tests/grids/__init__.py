"""Published grids of test parameters as data, run through our functions: `make test-grids`. See docs/testing.md."""
