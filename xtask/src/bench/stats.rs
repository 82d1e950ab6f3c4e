//! Medians, and how sure one may be of them.

use serde::Serialize;

/// How often the data is drawn again for an interval.
const DRAWS: usize = 4000;
/// An interval whose half-width is beyond this share of the median says little.
const WIDE: f64 = 0.2;

/// A median with the interval that holds it in 95 of 100 cases.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Estimate {
    pub(crate) median: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
    /// Of how many values.
    pub(crate) count: usize,
}

impl Estimate {
    /// The median of all values and its bootstrap interval. Each group is what was measured in one
    /// boot: groups are drawn first, then values within them, because boots differ from each other
    /// more than runs within one do. `None` without values.
    pub(crate) fn of(groups: &[Vec<f64>]) -> Option<Self> {
        let groups: Vec<&Vec<f64>> = groups.iter().filter(|group| !group.is_empty()).collect();
        let all: Vec<f64> = groups.iter().copied().flatten().copied().collect();
        let median_of_all = median(&all)?;
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        let mut medians = Vec::with_capacity(DRAWS);
        let mut drawn = Vec::with_capacity(all.len());
        for _ in 0..DRAWS {
            drawn.clear();
            for _ in 0..groups.len() {
                let group = groups[random.below(groups.len())];
                drawn.extend((0..group.len()).map(|_| group[random.below(group.len())]));
            }
            medians.extend(median(&drawn));
        }
        medians.sort_by(f64::total_cmp);
        Some(Self {
            median: median_of_all,
            low: medians[DRAWS / 40],
            high: medians[DRAWS - 1 - DRAWS / 40],
            count: all.len(),
        })
    }

    /// Whether the interval is too wide to rely on.
    pub(crate) fn is_wide(&self) -> bool {
        (self.high - self.low) / 2.0 > WIDE * self.median.abs()
    }
}

/// The middle value, or the mean of the two middle ones.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

/// xorshift64*: the same data gives the same interval.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let value = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33;
        usize::try_from(value).unwrap_or_default() % bound
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_odd_and_even() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0][..1]), Some(3.0));
        assert_eq!(median(&[1.0, 2.0, 9.0]), Some(2.0));
        assert_eq!(median(&[1.0, 3.0]), Some(2.0));
    }

    #[test]
    fn median_of_odd_even_and_none() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(Estimate::of(&[vec![]]), None);
    }

    #[test]
    fn equal_values_leave_no_doubt() {
        let estimate = Estimate::of(&[vec![2.0; 5], vec![2.0; 5]]).unwrap();
        assert_eq!(
            (estimate.low, estimate.high, estimate.count),
            (2.0, 2.0, 10)
        );
        assert!(!estimate.is_wide());
    }

    #[test]
    fn the_interval_of_known_data() {
        // of 1..=99 the median is 50; the interval by order statistics is about 40 to 60
        let values: Vec<f64> = (1..=99).map(f64::from).collect();
        let estimate = Estimate::of(&[values]).unwrap();
        assert_eq!(estimate.median, 50.0);
        assert!((37.0..=43.0).contains(&estimate.low), "{estimate:?}");
        assert!((57.0..=63.0).contains(&estimate.high), "{estimate:?}");
    }

    #[test]
    fn boots_that_disagree_widen_it() {
        let apart = Estimate::of(&[vec![1.0, 1.01, 1.02], vec![2.0, 2.01, 2.02]]).unwrap();
        assert!(
            apart.low < 1.1 && apart.high > 1.9 && apart.is_wide(),
            "{apart:?}"
        );
    }
}
