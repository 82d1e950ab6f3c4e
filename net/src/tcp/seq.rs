//! Sequence numbers: 32 bits that wrap (RFC 9293, 3.4).

use std::ops::{Add, AddAssign, Sub};

/// A TCP sequence number. Comparisons are modular and meaningful for distances below 2^31.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SeqNum(pub u32);

impl SeqNum {
    /// True when `self` comes before `other`.
    pub fn before(self, other: Self) -> bool {
        // The sign of the wrapped distance decides, hence the cast.
        (self.0.wrapping_sub(other.0)).cast_signed() < 0
    }

    /// True when `self` comes after `other`.
    pub fn after(self, other: Self) -> bool {
        other.before(self)
    }

    /// True when `self` comes before `other` or is equal to it.
    pub fn at_or_before(self, other: Self) -> bool {
        !self.after(other)
    }

    /// The later of two numbers.
    pub fn max(self, other: Self) -> Self {
        if self.before(other) { other } else { self }
    }
}

impl Add<u32> for SeqNum {
    type Output = Self;
    fn add(self, octets: u32) -> Self {
        Self(self.0.wrapping_add(octets))
    }
}

impl AddAssign<u32> for SeqNum {
    fn add_assign(&mut self, octets: u32) {
        *self = *self + octets;
    }
}

impl Sub<u32> for SeqNum {
    type Output = Self;
    fn sub(self, octets: u32) -> Self {
        Self(self.0.wrapping_sub(octets))
    }
}

/// Octets from `rhs` up to `self`; `self` must not be before `rhs`.
impl Sub for SeqNum {
    type Output = u32;
    fn sub(self, rhs: Self) -> u32 {
        self.0.wrapping_sub(rhs.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn order_is_that_of_the_distance(start: u32, distance in 1u32..1 << 31) {
            let (a, b) = (SeqNum(start), SeqNum(start) + distance);
            prop_assert!(a.before(b) && b.after(a));
            prop_assert!(!b.before(a) && a.at_or_before(b));
            prop_assert_eq!(b - a, distance);
            prop_assert_eq!(a.max(b), b);
            prop_assert_eq!(b - distance, a);
        }
    }

    #[test]
    fn equal_numbers_are_neither_before_nor_after() {
        let a = SeqNum(u32::MAX);
        assert!(!a.before(a) && !a.after(a) && a.at_or_before(a));
    }
}
