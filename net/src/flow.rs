//! Flows: who talks to whom, and the table they live in.

use std::collections::HashMap;
use std::net::SocketAddr;

/// The two ends of a flow as the guest sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlowKey {
    /// The guest's end.
    pub guest: SocketAddr,
    /// The far end, before any translation. Of the same address family.
    pub far: SocketAddr,
}

/// Names a flow for as long as it lives; a later flow in the same slot has another name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlowId {
    index: u32,
    generation: u32,
}

impl FlowId {
    /// Bits that [`Self::to_bits`] uses.
    pub const BITS: u32 = 56;

    /// Packs the id into the low [`Self::BITS`] bits, to ride in an event token.
    pub fn to_bits(self) -> u64 {
        u64::from(self.generation & 0x00ff_ffff) << 32 | u64::from(self.index)
    }

    /// Undoes [`Self::to_bits`].
    pub fn from_bits(bits: u64) -> Self {
        // Truncation takes the index back out.
        #[expect(clippy::cast_possible_truncation)]
        let (index, generation) = (bits as u32, (bits >> 32) as u32 & 0x00ff_ffff);
        Self { index, generation }
    }
}

/// A bounded table of flows, found by id or by key.
#[derive(Debug)]
pub struct FlowTable<T> {
    slots: Vec<(u32, Option<(FlowKey, T)>)>,
    free: Vec<u32>,
    by_key: HashMap<FlowKey, FlowId>,
    limit: usize,
    /// The flow found last: bursts come from one flow more often than not.
    last: Option<(FlowKey, FlowId)>,
}

impl<T> FlowTable<T> {
    /// An empty table for at most `limit` flows.
    pub fn new(limit: usize) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            by_key: HashMap::new(),
            limit,
            last: None,
        }
    }

    /// Flows in the table.
    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    /// True without flows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True when the table has no room.
    pub fn is_full(&self) -> bool {
        self.len() >= self.limit
    }

    /// The flow with this key.
    pub fn find(&mut self, key: &FlowKey) -> Option<FlowId> {
        if let Some((last, id)) = &self.last
            && last == key
        {
            return Some(*id);
        }
        let id = *self.by_key.get(key)?;
        self.last = Some((*key, id));
        Some(id)
    }

    /// True when a flow has this key.
    pub fn contains(&self, key: &FlowKey) -> bool {
        self.by_key.contains_key(key)
    }

    /// Adds the flow that `make` builds for its id.
    ///
    /// # Errors
    /// Passes on what `make` reports; the table is then unchanged. The table must not be full, nor
    /// hold `key`.
    pub fn insert<E>(
        &mut self,
        key: FlowKey,
        make: impl FnOnce(FlowId) -> Result<T, E>,
    ) -> Result<FlowId, E> {
        let index = match self.free.last() {
            Some(&index) => index,
            // Bounded by `limit`.
            None => u32::try_from(self.slots.len()).unwrap_or(u32::MAX),
        };
        let generation = self
            .slots
            .get(index as usize)
            .map_or(0, |&(generation, _)| generation);
        let id = FlowId { index, generation };
        let flow = make(id)?;
        if self.free.pop().is_none() {
            self.slots.push((generation, None));
        }
        self.slots[index as usize].1 = Some((key, flow));
        self.by_key.insert(key, id);
        Ok(id)
    }

    /// The flow named `id`, if it still lives.
    pub fn get_mut(&mut self, id: FlowId) -> Option<(&FlowKey, &mut T)> {
        match self.slots.get_mut(id.index as usize) {
            Some((generation, Some((key, flow)))) if *generation == id.generation => {
                Some((key, flow))
            }
            _ => None,
        }
    }

    /// Takes the flow named `id` out.
    pub fn remove(&mut self, id: FlowId) -> Option<(FlowKey, T)> {
        let (generation, slot) = self.slots.get_mut(id.index as usize)?;
        if *generation != id.generation {
            return None;
        }
        let (key, flow) = slot.take()?;
        *generation = (*generation + 1) & 0x00ff_ffff;
        self.free.push(id.index);
        self.by_key.remove(&key);
        self.last = None;
        Some((key, flow))
    }

    /// The ids of all flows.
    pub fn ids(&self) -> impl Iterator<Item = FlowId> {
        self.by_key.values().copied()
    }

    /// All flows.
    pub fn iter(&self) -> impl Iterator<Item = (&FlowKey, &T)> {
        self.slots
            .iter()
            .filter_map(|(_, slot)| slot.as_ref().map(|(key, flow)| (key, flow)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(port: u16) -> FlowKey {
        FlowKey {
            guest: ([10, 0, 2, 15], port).into(),
            far: ([192, 0, 2, 1], 80).into(),
        }
    }

    #[test]
    fn an_id_does_not_outlive_its_flow() {
        let mut table = FlowTable::new(2);
        let a = table.insert(key(1), |_| Ok::<_, ()>("a")).unwrap();
        assert_eq!(table.find(&key(1)), Some(a));
        assert_eq!(table.remove(a).unwrap().1, "a");
        assert_eq!(table.find(&key(1)), None);
        let b = table.insert(key(2), |_| Ok::<_, ()>("b")).unwrap();
        assert!(table.get_mut(a).is_none());
        assert_eq!(FlowId::from_bits(b.to_bits()), b);
        assert_eq!(table.get_mut(b).unwrap().1, &mut "b");
    }

    #[test]
    fn a_failed_insert_leaves_no_trace() {
        let mut table = FlowTable::<()>::new(1);
        assert_eq!(table.insert(key(1), |_| Err("no socket")), Err("no socket"));
        assert_eq!(table.len(), 0);
        let id = table.insert(key(1), |_| Ok::<_, ()>(())).unwrap();
        assert!(table.is_full());
        assert!(table.get_mut(id).is_some());
    }
}
