"""Pure functions, one equation each. Shapes: b local anchors, B global candidates, d embedding, m prototypes."""
