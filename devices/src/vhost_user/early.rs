//! A request that comes before its time.
//!
//! SET_VRING_ENABLE is for front-ends that accepted `VHOST_USER_F_PROTOCOL_FEATURES`. QEMU's network
//! card sends it when it is made, long before SET_FEATURES, and the request handler of the crate
//! `vhost` would end the connection over that. So until SET_FEATURES these requests are taken off the
//! socket here.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;

use rustix::net::{RecvFlags, recv};

const SET_VRING_ENABLE: u32 = 18;
const HEADER: usize = 12;
const BODY: usize = 8;
/// Header flags: the version, the mark of an answer, and the wish for one.
const VERSION: u32 = 1;
const REPLY: u32 = 4;
const NEED_REPLY: u32 = 8;

/// What the request says.
#[derive(Clone, Copy, Debug)]
pub(super) struct RingEnable {
    pub(super) index: u32,
    pub(super) enable: bool,
    wants_answer: bool,
}

/// Takes a whole SET_VRING_ENABLE off `stream`, if that is what comes next.
///
/// # Errors
/// Fails when the stream does. What is not such a request stays where it is.
pub(super) fn ring_enable(mut stream: &UnixStream) -> io::Result<Option<RingEnable>> {
    let mut message = [0; HEADER + BODY];
    let flags = RecvFlags::PEEK | RecvFlags::WAITALL;
    let (_, len) = recv(stream, &mut message[..HEADER], flags)?;
    let word = |bytes: &[u8], at: usize| {
        let bytes = bytes.get(at..at + 4).and_then(|word| word.try_into().ok());
        bytes.map_or(0, u32::from_ne_bytes)
    };
    let (code, flags, size) = (word(&message, 0), word(&message, 4), word(&message, 8));
    let is_one = len == HEADER
        && code == SET_VRING_ENABLE
        && flags & !NEED_REPLY == VERSION
        && size == BODY as u32;
    if !is_one {
        return Ok(None);
    }
    stream.read_exact(&mut message)?;
    Ok(match word(&message, HEADER + 4) {
        enable @ (0 | 1) => Some(RingEnable {
            index: word(&message, HEADER),
            enable: enable == 1,
            wants_answer: flags & NEED_REPLY != 0,
        }),
        other => {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("a ring is enabled by {other}"),
            ));
        }
    })
}

impl RingEnable {
    /// Tells the front-end that it was done, if it asked for that.
    ///
    /// # Errors
    /// Fails when the stream does.
    pub(super) fn answer(self, mut stream: &UnixStream) -> io::Result<()> {
        if !self.wants_answer {
            return Ok(());
        }
        let mut message = [0; HEADER + BODY];
        for (at, word) in [SET_VRING_ENABLE, VERSION | REPLY, BODY as u32]
            .into_iter()
            .enumerate()
        {
            message[4 * at..4 * at + 4].copy_from_slice(&word.to_ne_bytes());
        }
        stream.write_all(&message)
    }
}
