"""`miles conform`: each op against an oracle that shares no code with it, property by property.

Importing this package loads the standard library alone. `properties.py` says what can be shown,
`oracle/` evaluates the written orders anew, `checks/` holds one module per op, `suite.py` runs
them, `certificate.py` writes what was found and `requirement.py` is what `miles launch` asks of it.
A property that was not exercised is "not shown", never "ok".
"""
