"""HTTP: endpoints, wire types of each API, errors and metrics, over `engine.interface.EngineClient`. No torch."""
