"""Making, distilling and evaluating draft models. `corpus` needs the standard library only."""
