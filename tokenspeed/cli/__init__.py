"""The command line: one file a subcommand, each with `run(argv) -> exit code`. Wiring only, no logic of the engine."""
