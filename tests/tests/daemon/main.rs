//! `vgpud` for its operator: vGPUs, upgrades, crashes, systemd, metrics, consoles.

mod adoption;
mod console;
mod crashes;
mod handover;
mod lifecycle;
mod metrics;
mod migration;
mod nvidia;
mod nvidia_replacement;
mod nvidia_saving;
mod replacement;
mod replacement_endurance;
mod resilience;
mod service;
mod staged_memory;
mod web;
mod worker_upgrade;
