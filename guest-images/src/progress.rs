//! What is going on, on a terminal; nothing elsewhere.

use std::io::IsTerminal;
use std::sync::Arc;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// A spinner that says which step is running. Clones share it; it vanishes with the last one.
#[derive(Clone, Debug)]
pub struct Progress {
    bar: Arc<Bar>,
}

#[derive(Debug)]
struct Bar(ProgressBar);

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

impl Progress {
    /// A spinner on stderr, or nothing when that is not a terminal.
    pub fn new() -> Self {
        let bar = if std::io::stderr().is_terminal() {
            let bar = ProgressBar::new_spinner();
            if let Ok(style) = ProgressStyle::with_template("{spinner} {wide_msg} {elapsed}") {
                bar.set_style(style);
            }
            bar
        } else {
            ProgressBar::hidden()
        };
        Self {
            bar: Arc::new(Bar(bar)),
        }
    }

    /// Names the step that starts now.
    pub fn step(&self, what: &str) {
        let bar = &self.bar.0;
        if bar.is_finished() {
            bar.reset();
        }
        bar.set_message(what.to_owned());
        bar.enable_steady_tick(Duration::from_millis(100));
    }

    /// Takes the spinner off the terminal until the next step.
    pub fn clear(&self) {
        self.bar.0.finish_and_clear();
    }

    /// Says one line to the user, terminal or not.
    pub fn note(&self, what: &str) {
        self.bar.0.suspend(|| eprintln!("{what}"));
    }
}

impl Default for Progress {
    fn default() -> Self {
        Self::new()
    }
}
