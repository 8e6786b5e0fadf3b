"""Adapters: one module per framework, imported only where that framework is loaded.

They call the public functions of `paceline` from the framework's own callbacks. With `PACELINE=1`
they attach themselves (`paceline_autostart.frameworks`); `docs/integrations.md` has a row for each.
"""
