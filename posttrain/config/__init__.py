"""Every option of every verb: frozen dataclasses, one field an option, documented where it is declared.

The command line, recipes (TOML) and the Python functions all fill in these and nothing else. `verbs` is the table of verbs.
`training` and `inference` have their options, `scale` those of plans and batch systems, `row_options` and `shared_options`
those that several have in common.
"""
