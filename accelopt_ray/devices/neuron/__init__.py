"""NeuronCores of this machine as a device: the real toolchain, of either generation, behind the device protocol.

Written against the documented interfaces alone and tested against a stand-in toolchain that follows the same documents;
see ``docs/trainium.md`` for what has and what has not run on hardware.
"""
