"""Labelled test sets that packages carry, as zero-shot tasks: CIFAR-10, MNIST, Fashion-MNIST, Quick, Draw!, digits."""
