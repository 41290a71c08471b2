"""The command `rt`: one module for each subcommand, found through entry points.

Data goes to stdout, with `--json` one object a line. Messages and progress bars go to stderr. Exit status:
0 success, 1 failure, 2 wrong options, 130 and 143 interrupted. Every option can be set as
`RT_<COMMAND>_<OPTION>`.
"""
