//! The terminal in raw mode, and its way back.
//!
//! The old settings are kept in one place and restored, once, by whatever comes first: the guard's
//! drop, the panic hook, or `exit` called by any thread. Signals that stop the VM become events
//! ([`crate::event_loop`]), so they end in the guard's drop too.
#![expect(unsafe_code, reason = "terminal settings, and a hook at exit")]

use std::io::{self, IsTerminal as _};
use std::sync::{Mutex, Once, PoisonError};

static SAVED: Mutex<Option<libc::termios>> = Mutex::new(None);
static HOOKS: Once = Once::new();

/// Restores the terminal when dropped.
#[must_use]
pub struct RawMode(());

impl RawMode {
    /// Makes stdin raw, if it is a terminal and ours to change.
    ///
    /// Keys that would be signals go to the guest. Output processing stays on, so that messages of
    /// ours start at the left edge.
    ///
    /// # Errors
    /// Fails when the terminal does.
    pub fn enter() -> io::Result<Option<Self>> {
        if !io::stdin().is_terminal() || !in_foreground() {
            return Ok(None);
        }
        HOOKS.call_once(install_hooks);
        // SAFETY: an all-zero `termios` is a valid value.
        let mut settings: libc::termios = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes one `termios`, which `settings` is.
        if unsafe { libc::tcgetattr(libc::STDIN_FILENO, &raw mut settings) } < 0 {
            return Err(io::Error::last_os_error());
        }
        *SAVED.lock().unwrap_or_else(PoisonError::into_inner) = Some(settings);
        settings.c_iflag &= !(libc::IGNBRK | libc::BRKINT | libc::PARMRK | libc::ISTRIP);
        settings.c_iflag &= !(libc::INLCR | libc::IGNCR | libc::ICRNL | libc::IXON);
        settings.c_lflag &= !(libc::ECHO | libc::ECHONL | libc::ICANON | libc::ISIG | libc::IEXTEN);
        settings.c_cflag = (settings.c_cflag & !(libc::CSIZE | libc::PARENB)) | libc::CS8;
        settings.c_cc[libc::VMIN] = 1;
        settings.c_cc[libc::VTIME] = 0;
        let raw = Self(());
        apply(&settings)?;
        Ok(Some(raw))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        restore();
    }
}

fn apply(settings: &libc::termios) -> io::Result<()> {
    // SAFETY: the kernel reads one `termios`.
    match unsafe { libc::tcsetattr(libc::STDIN_FILENO, libc::TCSANOW, settings) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Puts the old settings back; does nothing when there are none, or they are back already.
pub fn restore() {
    // `try_lock`: a thread that panics or exits while it holds the lock must not wait for itself.
    let Ok(mut saved) = SAVED.try_lock() else {
        return;
    };
    if let Some(settings) = saved.take() {
        // Nothing sensible can be done about a terminal that is gone.
        let _ = apply(&settings);
    }
}

/// Changing the terminal from the background would stop us.
fn in_foreground() -> bool {
    // SAFETY: takes and returns integers only.
    let group = unsafe { libc::tcgetpgrp(libc::STDIN_FILENO) };
    // SAFETY: takes nothing and returns an integer.
    group == unsafe { libc::getpgrp() }
}

fn install_hooks() {
    let earlier = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        restore();
        earlier(info);
    }));
    // SAFETY: `at_exit` has the right type and does not unwind.
    unsafe { libc::atexit(at_exit) };
}

extern "C" fn at_exit() {
    restore();
}
