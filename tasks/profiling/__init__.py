"""What a network costs: parameters, FLOP, memory and time, by formula and measured."""
