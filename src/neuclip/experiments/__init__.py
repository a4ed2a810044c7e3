"""The paper's tables and figures as commands: one YAML file each, a runner, and pages made from records."""
