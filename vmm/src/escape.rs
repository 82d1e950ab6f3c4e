//! The escape key of the terminal: Ctrl-A X quits, Ctrl-A Ctrl-A sends Ctrl-A.

const CTRL_A: u8 = 1;

/// Remembers a Ctrl-A whose second key has not come yet.
#[derive(Debug, Default)]
pub struct Escape {
    pressed: bool,
}

/// What typed bytes amount to.
#[derive(Debug, PartialEq, Eq)]
pub struct Keys {
    /// For the guest.
    pub text: Vec<u8>,
    /// Whether the user quits, after `text`.
    pub quit: bool,
}

impl Escape {
    /// Takes the escapes out of `typed`. Ctrl-A before any other key is passed on, with that key.
    pub fn filter(&mut self, typed: &[u8]) -> Keys {
        let mut text = Vec::with_capacity(typed.len());
        for &byte in typed {
            match (std::mem::take(&mut self.pressed), byte) {
                (false, CTRL_A) => self.pressed = true,
                (false, _) => text.push(byte),
                (true, CTRL_A) => text.push(CTRL_A),
                (true, b'x' | b'X') => return Keys { text, quit: true },
                (true, _) => text.extend([CTRL_A, byte]),
            }
        }
        Keys { text, quit: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys() {
        type Case = (&'static [&'static [u8]], &'static [u8], bool);
        let table: [Case; 7] = [
            (&[b"abc"], b"abc", false),
            (&[b"ab\x01xcd"], b"ab", true),
            (&[b"\x01", b"X"], b"", true),
            (&[b"\x01\x01x"], b"\x01x", false),
            (&[b"\x01", b"\x01", b"\x01x"], b"\x01", true),
            (&[b"\x01c"], b"\x01c", false),
            (&[b"\x01"], b"", false),
        ];
        for (chunks, text, quit) in table {
            let mut escape = Escape::default();
            let mut got = Keys {
                text: Vec::new(),
                quit: false,
            };
            for chunk in chunks {
                let keys = escape.filter(chunk);
                got.text.extend(keys.text);
                got.quit |= keys.quit;
            }
            assert_eq!((got.text.as_slice(), got.quit), (text, quit), "{chunks:?}");
        }
    }
}
