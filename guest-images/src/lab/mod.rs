//! The lab: a whole x86 machine with hardware virtualisation, emulated by QEMU.
//!
//! On hosts where KVM is missing or emulated, a stock kernel cannot be booted under wonton itself.
//! QEMU's TCG emulates AMD's SVM well enough that a Debian kernel inside it offers a real
//! `/dev/kvm` (and `/dev/vhost-net`, `/dev/net/tun`). Wonton runs in there, unchanged.
//!
//! ```text
//! this machine          127.0.0.1
//!   QEMU user network   192.168.76.0/24, this machine is 192.168.76.2 ("machine")
//!     the lab           192.168.76.15, root, wonton in /usr/bin, kernels in /images/{6.1,6.12}
//!       wonton
//!         the guest     10.0.2.15, the lab is 10.0.2.2
//! ```
//!
//! [`LabJob`] says what to run; [`run_lab`] runs it unattended and returns what it reported,
//! [`run_interactive`] gives it the terminal.

mod command;
pub mod image;
mod interactive;
mod job;
mod scripted;

pub use image::LabImage;
pub use interactive::run_interactive;
pub use job::{LabFile, LabJob, LabResult};
pub use scripted::{run_lab, run_lab_with};
