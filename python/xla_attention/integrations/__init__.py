"""Our operators behind the interfaces of other projects: a module per project, which imports it when it is called."""
