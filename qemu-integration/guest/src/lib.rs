//! The runtime that runs inside a VM.
