"""The command `rt`: one module a subcommand, found through entry points.

Data goes to stdout, with `--json` one object a line; words and progress bars go to stderr. Exit status:
0 done, 1 failed, 2 misuse, 130 and 143 interrupted. Every option can be given as `RT_<COMMAND>_<OPTION>`.
"""
