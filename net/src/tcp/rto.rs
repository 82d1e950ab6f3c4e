//! The retransmission time-out (RFC 6298).

use std::time::Duration;

/// Before the first measurement (RFC 6298, 2.1).
pub const INITIAL_RTO: Duration = Duration::from_secs(1);
/// RFC 6298 (2.4) asks for 1 s. This link is a memory copy long and the guest's delayed ACK is 40 ms
/// to 200 ms, so Linux's own floor is used.
pub const MIN_RTO: Duration = Duration::from_millis(200);
/// RFC 6298 (2.5) allows an upper bound of at least 60 s.
pub const MAX_RTO: Duration = Duration::from_secs(60);

/// Round-trip estimate and the time-out that follows from it.
#[derive(Clone, Debug)]
pub struct Rto {
    smoothed: Option<Duration>,
    variation: Duration,
    backoff: u32,
}

impl Rto {
    /// No measurement yet.
    pub fn new() -> Self {
        Self {
            smoothed: None,
            variation: Duration::ZERO,
            backoff: 0,
        }
    }

    /// Takes one round-trip measurement of a segment that was sent once (Karn's algorithm, section 3).
    pub fn sample(&mut self, rtt: Duration) {
        match self.smoothed {
            None => {
                self.smoothed = Some(rtt);
                self.variation = rtt / 2;
            }
            Some(smoothed) => {
                self.variation = (self.variation * 3 + smoothed.abs_diff(rtt)) / 4;
                self.smoothed = Some((smoothed * 7 + rtt) / 8);
            }
        }
        self.backoff = 0;
    }

    /// The current time-out.
    pub fn timeout(&self) -> Duration {
        let base = self.smoothed.map_or(INITIAL_RTO, |smoothed| {
            (smoothed + self.variation * 4).max(MIN_RTO)
        });
        base.saturating_mul(1 << self.backoff.min(10)).min(MAX_RTO)
    }

    /// The timer expired: double it (section 5.5).
    pub fn back_off(&mut self) {
        self.backoff += 1;
    }

    /// New data was acknowledged: the path works again.
    pub fn progress(&mut self) {
        self.backoff = 0;
    }

    /// The smoothed round-trip time, once measured.
    pub fn smoothed(&self) -> Option<Duration> {
        self.smoothed
    }
}

impl Default for Rto {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn starts_at_one_second_and_doubles_up_to_the_bound() {
        let mut rto = Rto::new();
        let mut seen = Vec::new();
        for _ in 0..8 {
            seen.push(rto.timeout().as_secs());
            rto.back_off();
        }
        assert_eq!(seen, [1, 2, 4, 8, 16, 32, 60, 60]);
        rto.progress();
        assert_eq!(rto.timeout(), INITIAL_RTO);
    }

    #[test]
    fn follows_the_measurements() {
        let mut rto = Rto::new();
        rto.sample(ms(400));
        assert_eq!(rto.timeout(), ms(400 + 4 * 200));
        for _ in 0..200 {
            rto.sample(ms(1));
        }
        assert_eq!(rto.timeout(), MIN_RTO);
    }
}
