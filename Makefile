# The three verbs; each sets up what it needs.
.PHONY: test unit demo
test:    ## format, lint, types and all tests
	scripts/test
unit:    ## the pure tests in their quick form: under three seconds of CPU time
	.venv/bin/python -m pytest tests/unit
demo:    ## answer examples/prompts.jsonl with the built-in model
	scripts/demo
