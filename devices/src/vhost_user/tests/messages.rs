//! Messages as bytes, for what no well-behaved front-end sends.

use std::os::fd::RawFd;
use std::os::unix::net::UnixStream;

use vmm_sys_util::sock_ctrl_msg::ScmSocket as _;

use super::FrontEnd;

pub(super) const SET_FEATURES: u32 = 2;
pub(super) const SET_MEM_TABLE: u32 = 5;
pub(super) const SET_VRING_NUM: u32 = 8;
pub(super) const SET_VRING_ADDR: u32 = 9;
pub(super) const SET_VRING_BASE: u32 = 10;
pub(super) const GET_VRING_BASE: u32 = 11;
pub(super) const SET_VRING_KICK: u32 = 12;
pub(super) const SET_VRING_CALL: u32 = 13;
pub(super) const SET_VRING_ERR: u32 = 14;
pub(super) const SET_VRING_ENABLE: u32 = 18;

/// A message: header and body.
pub(super) fn message(code: u32, body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(body.len()).unwrap();
    let mut bytes = Vec::new();
    for word in [code, 1, len] {
        bytes.extend(word.to_ne_bytes());
    }
    bytes.extend(body);
    bytes
}

pub(super) fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

pub(super) fn longs(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Sends bytes with descriptors. A back-end that hung up already is as good as one that will.
pub(super) fn send(stream: &UnixStream, bytes: &[u8], fds: &[RawFd]) {
    let _ = stream.send_with_fds(&[bytes], fds);
}

/// One of the messages that carry a ring's descriptor.
pub(super) fn set_fd(front_end: &FrontEnd, code: u32, value: u64, fds: &[RawFd]) {
    send(&front_end.raw, &message(code, &longs(&[value])), fds);
}
