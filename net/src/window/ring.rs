//! The TCP window ring.
//!
//! Bytes enter from the host socket (`readv` into the free room, at most two pieces) and stay until
//! the guest acknowledges them, so a retransmit costs no system call. A segment is at most two
//! slices of it. A wrap, an odd split and an empty second slice are all ordinary.

use std::io::{self, IoSliceMut};

/// Smallest ring, allocated with the first byte.
pub const MIN_CAPACITY: usize = 16 << 10;
/// Largest ring: the most a guest's window can use of one flow.
pub const MAX_CAPACITY: usize = 4 << 20;

/// A byte ring whose capacity is a power of two. An empty ring owns no memory until it is filled.
#[derive(Debug, Default)]
pub struct Ring {
    bytes: Box<[u8]>,
    /// Index of the oldest byte; always below the capacity.
    head: usize,
    len: usize,
}

impl Ring {
    /// Bytes held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when nothing is held.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes that fit without growing.
    pub fn room(&self) -> usize {
        self.bytes.len() - self.len
    }

    /// Bytes of memory owned.
    pub fn capacity(&self) -> usize {
        self.bytes.len()
    }

    /// Doubles the capacity, within the bounds. False when it is at its largest.
    pub fn grow(&mut self) -> bool {
        let capacity = (self.bytes.len() * 2).max(MIN_CAPACITY);
        if capacity > MAX_CAPACITY {
            return false;
        }
        self.resize(capacity);
        true
    }

    /// Gives memory back when nothing is held.
    pub fn shrink_if_empty(&mut self) {
        if self.len == 0 {
            *self = Self::default();
        }
    }

    fn resize(&mut self, capacity: usize) {
        let mut bytes = vec![0; capacity].into_boxed_slice();
        let (front, back) = self.slices(0, self.len);
        bytes[..front.len()].copy_from_slice(front);
        bytes[front.len()..][..back.len()].copy_from_slice(back);
        self.bytes = bytes;
        self.head = 0;
    }

    /// Fills free room by one call of `read`, which returns how many bytes it put there.
    ///
    /// # Errors
    /// Passes on what `read` reports; the ring is then unchanged.
    pub fn fill(
        &mut self,
        read: impl FnOnce(&mut [IoSliceMut<'_>; 2]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let capacity = self.bytes.len();
        let room = capacity - self.len;
        let tail = if capacity == 0 {
            0
        } else {
            (self.head + self.len) & (capacity - 1)
        };
        let (before, after) = self.bytes.split_at_mut(tail);
        let first = room.min(after.len());
        let mut pieces = [
            IoSliceMut::new(&mut after[..first]),
            IoSliceMut::new(&mut before[..room - first]),
        ];
        let n = read(&mut pieces)?.min(room);
        self.len += n;
        Ok(n)
    }

    /// The `len` bytes that start `offset` bytes past the oldest. Cut off at what is held.
    pub fn slices(&self, offset: usize, len: usize) -> (&[u8], &[u8]) {
        let offset = offset.min(self.len);
        let len = len.min(self.len - offset);
        if len == 0 {
            return (&[], &[]);
        }
        let start = (self.head + offset) & (self.bytes.len() - 1);
        let first = len.min(self.bytes.len() - start);
        (
            &self.bytes[start..start + first],
            &self.bytes[..len - first],
        )
    }

    /// Forgets the oldest `n` bytes, or all.
    pub fn consume(&mut self, n: usize) {
        let n = n.min(self.len);
        self.len -= n;
        self.head = if self.len == 0 {
            // An empty ring starts over, so that short exchanges never wrap.
            0
        } else {
            (self.head + n) & (self.bytes.len() - 1)
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    fn push(ring: &mut Ring, bytes: &[u8]) -> usize {
        ring.fill(|pieces| {
            let mut done = 0;
            for piece in pieces.iter_mut() {
                let n = piece.len().min(bytes.len() - done);
                piece[..n].copy_from_slice(&bytes[done..done + n]);
                done += n;
            }
            Ok(done)
        })
        .unwrap()
    }

    #[test]
    fn an_empty_ring_owns_nothing_and_accepts_nothing() {
        let mut ring = Ring::default();
        assert_eq!((ring.capacity(), ring.room()), (0, 0));
        assert_eq!(push(&mut ring, b"x"), 0);
        assert_eq!(ring.slices(0, 9), (&[][..], &[][..]));
        ring.consume(5);
        assert!(ring.grow());
        assert_eq!(ring.capacity(), MIN_CAPACITY);
    }

    #[test]
    fn grows_to_its_bound_and_no_further() {
        let mut ring = Ring::default();
        while ring.grow() {}
        assert_eq!(ring.capacity(), MAX_CAPACITY);
    }

    proptest! {
        #[test]
        fn behaves_as_a_queue(ops in prop::collection::vec((0u8..4, 0usize..20_000), 1..120)) {
            let mut ring = Ring::default();
            let mut model = VecDeque::new();
            let mut next = 0u8;
            for (op, n) in ops {
                match op {
                    0 => { ring.grow(); }
                    1 => {
                        let bytes: Vec<u8> = (0..n).map(|_| { next = next.wrapping_add(37); next }).collect();
                        let took = push(&mut ring, &bytes);
                        prop_assert_eq!(took, bytes.len().min(ring.capacity() - model.len()));
                        model.extend(&bytes[..took]);
                    }
                    2 => {
                        ring.consume(n);
                        model.drain(..n.min(model.len()));
                    }
                    _ => {
                        let (a, b) = ring.slices(n / 2, n);
                        let seen: Vec<u8> = a.iter().chain(b).copied().collect();
                        let want: Vec<u8> = model.iter().skip(n / 2).take(n).copied().collect();
                        prop_assert_eq!(seen, want);
                    }
                }
                prop_assert_eq!(ring.len(), model.len());
            }
        }
    }
}
