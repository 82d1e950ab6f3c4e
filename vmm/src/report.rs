//! Errors and logs for people.

use std::io::IsTerminal as _;

use devices::net::tap::TapError;
use devices::net::vhost::VhostError;
use tracing_subscriber::EnvFilter;

use crate::boot::BootError;
use crate::config::ConfigError;
use crate::kvm::KvmError;

/// Logs go to stderr; `WONTON_LOG` filters them (default `warn`).
pub fn init_logging() {
    let filter = EnvFilter::try_from_env("WONTON_LOG").unwrap_or_else(|_| EnvFilter::new("warn"));
    // Fails only when there is a subscriber already.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .try_init();
}

/// Prints the chain once, then a hint if one of its links has one.
pub fn error(error: &anyhow::Error) {
    eprintln!("error: {error:#}");
    if let Some(hint) = error.chain().find_map(hint) {
        eprintln!("hint: {hint}");
    }
}

fn hint(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    if let Some(error) = error.downcast_ref::<KvmError>() {
        return error.hint().map(str::to_owned);
    }
    if let Some(error) = error.downcast_ref::<BootError>() {
        return error.hint();
    }
    if let Some(error) = error.downcast_ref::<VhostError>() {
        return error.hint();
    }
    if let Some(error) = error.downcast_ref::<TapError>() {
        return error.hint();
    }
    error
        .downcast_ref::<ConfigError>()
        .and_then(ConfigError::hint)
}
