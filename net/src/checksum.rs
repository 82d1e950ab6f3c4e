//! The Internet checksum over bytes that lie in several places (RFC 1071).

use smoltcp::wire::checksum;

/// A running sum. Slices may have odd lengths: the next one's bytes then swap places, because the sum
/// is over 16-bit words of the whole.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sum {
    sum: u16,
    odd: bool,
}

impl Sum {
    /// Starts from a sum, such as that of a pseudo header.
    pub fn from_words(sum: u16) -> Self {
        Self { sum, odd: false }
    }

    /// Adds the next bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        let part = checksum::data(bytes);
        let part = if self.odd { part.swap_bytes() } else { part };
        self.sum = checksum::combine(&[self.sum, part]);
        self.odd ^= bytes.len() % 2 == 1;
    }

    /// The one's complement sum so far: what a partial checksum field holds.
    pub fn partial(self) -> u16 {
        self.sum
    }

    /// The value of a checksum field: the complement of the sum.
    pub fn finish(self) -> u16 {
        !self.sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn plain(bytes: &[u8]) -> u16 {
        let mut sum = 0u32;
        for pair in bytes.chunks(2) {
            sum += u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
        }
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        !(sum as u16)
    }

    #[test]
    fn every_split_point_gives_the_plain_sum() {
        for len in 0..70usize {
            let bytes: Vec<u8> = (0..len).map(|i| (i * 151 + 7) as u8).collect();
            for a in 0..=len {
                for b in a..=len {
                    let mut sum = Sum::default();
                    sum.add(&bytes[..a]);
                    sum.add(&bytes[a..b]);
                    sum.add(&bytes[b..]);
                    assert_eq!(sum.finish(), plain(&bytes), "len {len} split at {a}, {b}");
                }
            }
        }
    }

    proptest! {
        #[test]
        fn any_splits_of_long_data(bytes in prop::collection::vec(any::<u8>(), 0..9000),
                                   cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8)) {
            let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let mut sum = Sum::default();
            for pair in cuts.windows(2) {
                sum.add(&bytes[pair[0]..pair[1]]);
            }
            prop_assert_eq!(sum.finish(), plain(&bytes));
        }
    }
}
