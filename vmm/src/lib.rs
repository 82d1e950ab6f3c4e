//! The virtual machine monitor behind the binary `wonton`.
//!
//! ```text
//!   cli --> config --> run --+--> memory, boot, acpi       what the guest finds in RAM
//!                            +--> kvm, cpuid, msrs, regs   what its CPUs look like
//!                            +--> machine                  devices on the two buses
//!                            +--> vcpu (threads) --exit--> bus --> device
//!                            +--> event_loop (main thread) --> exit code
//! ```
//!
//! `serve` is the other way in: one card, no KVM, behind the vhost-user transport of `devices`.
//!
//! This crate knows KVM and the boot protocols. It does not know virtio's rings (crate `devices`)
//! or TCP (crate `net`). `unsafe` is confined to [`sys`], [`kvm`] and [`terminal`].

pub mod acpi;
pub mod backend;
pub mod boot;
pub mod check;
pub mod cli;
pub mod config;
pub mod cpuid;
pub mod escape;
pub mod event_loop;
pub mod exit;
pub mod kvm;
pub mod layout;
pub mod machine;
pub mod memory;
pub mod msi;
pub mod msrs;
pub mod regs;
pub mod report;
pub mod run;
pub mod serve;
pub mod sys;
pub mod terminal;
pub mod timing;
pub mod vcpu;
