//! The lines that host and guest exchange over the guest's console.
//!
//! ```text
//! guest  @@ready FEATURES RELEASE      once, when the network is up
//! host   ID COMMAND                    one line
//! guest  @@begin ID
//! guest  (what the command printed)
//! guest  @@end ID CODE
//! ```

use std::io::Read;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Instant;

use anyhow::{Result, bail};

/// How much of the console an error shows, in bytes.
const TAIL: usize = 2000;

/// What a command in the guest left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// Its exit code.
    pub code: i32,
    /// What it printed, stderr included.
    pub text: String,
}

/// The guest's side of the console, read by a thread of its own.
#[derive(Debug)]
pub(super) struct Console {
    chunks: Receiver<Vec<u8>>,
    /// Everything that came, as far as it is kept.
    text: String,
    /// Up to where `text` was looked at.
    seen: usize,
}

impl Console {
    /// Reads `pipe` until its end.
    pub(super) fn new(mut pipe: impl Read + Send + 'static) -> Self {
        let (sender, chunks) = channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 16 << 10];
            while let Ok(count @ 1..) = pipe.read(&mut buffer) {
                if sender.send(buffer[..count].to_vec()).is_err() {
                    break;
                }
            }
        });
        Self {
            chunks,
            text: String::new(),
            seen: 0,
        }
    }

    /// The rest of the line that begins with `marker`, and what came before it since the last one.
    /// Fails at `deadline` or when the guest ended, and shows the end of the console then.
    pub(super) fn wait_for(&mut self, marker: &str, deadline: Instant) -> Result<(String, String)> {
        loop {
            if let Some((before, rest, end)) = find(&self.text[self.seen..], marker) {
                let found = (rest.to_owned(), before.to_owned());
                self.seen += end;
                return Ok(found);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.chunks.recv_timeout(left) {
                Ok(chunk) => self.text += &String::from_utf8_lossy(&chunk).replace('\r', ""),
                Err(RecvTimeoutError::Timeout) => {
                    bail!("the guest did not answer in time; {}", self.tail())
                }
                Err(RecvTimeoutError::Disconnected) => bail!("the guest ended; {}", self.tail()),
            }
        }
    }

    /// Forgets what was looked at.
    pub(super) fn forget(&mut self) {
        self.text.drain(..self.seen);
        self.seen = 0;
    }

    /// The end of the console, for an error.
    pub(super) fn tail(&self) -> String {
        let start = self.text.len().saturating_sub(TAIL);
        let start = (start..=self.text.len())
            .find(|at| self.text.is_char_boundary(*at))
            .unwrap_or_default();
        match self.text[start..].trim() {
            "" => "its console is empty".to_owned(),
            tail => format!("its console ends with:\n{tail}"),
        }
    }
}

/// The first whole line of `text` that begins with `marker`: what is before it, its rest, its end.
fn find<'a>(text: &'a str, marker: &str) -> Option<(&'a str, &'a str, usize)> {
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        if let Some(rest) = line.strip_prefix(marker)
            && let Some(rest) = rest.strip_suffix('\n')
        {
            return Some((&text[..at], rest.trim(), at + line.len()));
        }
        at += line.len();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn markers_count_at_the_start_of_whole_lines_only() {
        assert_eq!(find("a @@end 1 0\n@@end 1", "@@end 1 "), None);
        assert_eq!(
            find("out\n@@end 1 0\nmore", "@@end 1 "),
            Some(("out\n", "0", 14))
        );
    }

    #[test]
    fn a_guest_that_ends_is_reported_with_its_last_words() {
        let mut console = Console::new(&b"Kernel panic\n"[..]);
        let error = console
            .wait_for("@@ready", Instant::now() + Duration::from_secs(5))
            .unwrap_err();
        let shown = format!("{error:#}");
        assert!(
            shown.contains("ended") && shown.contains("Kernel panic"),
            "{shown}"
        );
    }
}
