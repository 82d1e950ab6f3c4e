//! Scripted guests and hosts on a virtual clock.

pub(crate) mod datagrams;
pub(crate) mod guest;
pub(crate) mod host;
pub(crate) mod ring;
pub(crate) mod script;
