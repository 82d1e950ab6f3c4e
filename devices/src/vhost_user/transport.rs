//! What a front-end may ask, and what follows from it.

use std::fs::File;
use std::io;
use std::sync::Arc;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVirtioFeatures,
    VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Backend, Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};
use virtio_queue::QueueT as _;
use vm_memory::GuestAddressSpace as _;

use super::calls::Calls;
use super::memory::{MAX_SLOTS, Memory, invalid};
use super::ring::{Addresses, MAX_SIZE, Ring};
use crate::virtio::spec::{F_EVENT_IDX, F_VERSION_1};
use crate::virtio::{Activation, VirtioDevice};

/// Largest part of the configuration space that one message carries.
const MAX_CONFIG: u32 = 256;

/// The state shared with a front-end; see the [module](super).
pub(super) struct Transport {
    device: Box<dyn VirtioDevice>,
    /// Rings without which the device does not run.
    required: usize,
    rings: Vec<Ring>,
    calls: Arc<Calls>,
    memory: Memory,
    features: u64,
    /// The rings that run now.
    running: Vec<u16>,
    owned: bool,
    /// SET_FEATURES has come.
    negotiated: bool,
    /// The channel to the front-end. Open for as long as it is: a front-end may take its end as a sign
    /// of ours.
    backend: Option<Backend>,
}

/// An answer to a request that cannot be honoured.
fn refuse(error: io::Error) -> Error {
    Error::ReqHandlerError(error)
}

/// Makes a descriptor one that the worker may write to: it must not wait for a front-end that does
/// not read.
fn never_wait(file: Option<&File>) -> Result<()> {
    let Some(file) = file else { return Ok(()) };
    let flags = fcntl_getfl(file).map_err(|error| refuse(error.into()))?;
    fcntl_setfl(file, flags | OFlags::NONBLOCK).map_err(|error| refuse(error.into()))
}

impl Transport {
    pub(super) fn new(device: Box<dyn VirtioDevice>, required: usize) -> Self {
        let count = device.queue_max_sizes().len();
        Self {
            device,
            required,
            rings: (0..count).map(|_| Ring::default()).collect(),
            calls: Arc::new(Calls::new(count)),
            memory: Memory::new(),
            features: 0,
            running: Vec::new(),
            owned: false,
            negotiated: false,
            backend: None,
        }
    }

    /// The front-end is gone: forget it, keep what is behind the device.
    pub(super) fn disconnect(&mut self) {
        self.suspend();
        self.forget();
        self.memory.clear();
        self.owned = false;
        self.negotiated = false;
        self.backend = None;
    }

    /// Whether the front-end has said which features it accepts.
    pub(super) fn negotiated(&self) -> bool {
        self.negotiated
    }

    fn forget(&mut self) {
        self.rings.fill_with(Ring::default);
        self.calls.clear();
        self.features = 0;
    }

    fn ring(&mut self, index: impl Into<u64>) -> Result<&mut Ring> {
        let index = usize::try_from(index.into()).unwrap_or(usize::MAX);
        self.rings
            .get_mut(index)
            .ok_or_else(|| refuse(invalid(format!("there is no ring {index}"))))
    }

    /// Stops the device; the rings know where it stopped.
    fn suspend(&mut self) {
        if self.running.is_empty() {
            return;
        }
        self.running.clear();
        for (index, queue) in self.device.suspend() {
            if let Some(ring) = self.rings.get_mut(usize::from(index)) {
                ring.base = queue.next_avail();
            }
        }
    }

    /// Runs the rings that are ready, if the required ones are among them.
    fn update(&mut self) -> Result<()> {
        let ready: Vec<u16> = (0u16..)
            .zip(&self.rings)
            .filter(|(_, ring)| ring.is_ready())
            .map(|(index, _)| index)
            .collect();
        let required = ready.iter().filter(|&&i| usize::from(i) < self.required);
        let wanted = if required.count() == self.required {
            ready
        } else {
            Vec::new()
        };
        if wanted == self.running {
            return Ok(());
        }
        self.suspend();
        if wanted.is_empty() {
            return Ok(());
        }
        if self.features & F_VERSION_1 == 0 {
            return Err(refuse(io::Error::other(
                "the guest's driver is a legacy one: VIRTIO_F_VERSION_1 was not accepted",
            )));
        }
        let memory = self.memory.ram();
        let guard = memory.memory();
        let event_idx = self.features & F_EVENT_IDX != 0;
        let mut queues = Vec::new();
        for &index in &wanted {
            queues.push(
                self.rings[usize::from(index)]
                    .activate(index, event_idx, &guard)
                    .map_err(refuse)?,
            );
        }
        drop(guard);
        let activation = Activation {
            ram: memory,
            features: self.features & self.device.device_features(),
            queues,
            interrupt: self.calls.clone(),
        };
        // Among others, a doorbell that is a file nobody can wait for.
        self.device.activate(activation).map_err(|error| {
            let kind = error.kind();
            refuse(io::Error::new(kind, format!("cannot run: {error}")))
        })?;
        self.running = wanted;
        Ok(())
    }

    /// Changes something that a running device has taken over already.
    fn change(&mut self, change: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        self.suspend();
        change(self)?;
        self.update()
    }
}

impl VhostUserBackendReqHandlerMut for Transport {
    fn set_owner(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.owned, true) {
            return Err(Error::InvalidOperation("the session has an owner already"));
        }
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.owned = false;
        self.reset_device()
    }

    fn reset_device(&mut self) -> Result<()> {
        self.running.clear();
        self.device.reset();
        self.forget();
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.device.device_features() | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits())
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        let unknown = features & !self.get_features()?;
        if unknown != 0 {
            return Err(refuse(invalid(format!(
                "features {unknown:#x} were not offered"
            ))));
        }
        self.negotiated = true;
        // Without the protocol features there is no SET_VRING_ENABLE.
        let enabled = features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() == 0;
        if features == self.features && !enabled {
            return Ok(());
        }
        self.change(|this| {
            this.features = features;
            for ring in &mut this.rings {
                ring.enabled |= enabled;
            }
            Ok(())
        })
    }

    fn set_mem_table(
        &mut self,
        table: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        // Rings keep their guest addresses, and the device looks memory up anew for each burst.
        self.memory.set(table, files).map_err(refuse)?;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        self.ring(index)?;
        let size = u16::try_from(num).ok().filter(|&size| size <= MAX_SIZE);
        let Some(size) = size.filter(|size| size.is_power_of_two()) else {
            return Err(refuse(invalid(format!(
                "ring {index}: size {num} is not a power of two up to {MAX_SIZE}"
            ))));
        };
        self.change(|this| {
            this.ring(index)?.size = size;
            Ok(())
        })
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        self.ring(index)?;
        let at = |user| self.memory.guest_address(user).map_err(refuse);
        let addresses = Addresses {
            desc: at(descriptor)?,
            avail: at(available)?,
            used: at(used)?,
        };
        self.change(|this| {
            this.ring(index)?.addresses = Some(addresses);
            Ok(())
        })
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let base = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        self.ring(index)?;
        self.change(|this| {
            this.ring(index)?.base = base;
            Ok(())
        })
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        self.ring(index)?;
        // This is what stops a ring; the next kick descriptor starts it again.
        self.change(|this| {
            this.ring(index)?.kick = None;
            Ok(())
        })?;
        self.calls.set_call(index as usize, None);
        let base = self.ring(index)?.base;
        Ok(VhostUserVringState::new(index, base.into()))
    }

    fn set_vring_kick(&mut self, index: u8, file: Option<File>) -> Result<()> {
        self.ring(index)?;
        let Some(file) = file else {
            return Err(Error::InvalidOperation("polled rings are not supported"));
        };
        self.change(|this| {
            this.ring(index)?.set_kick(file);
            Ok(())
        })
    }

    fn set_vring_call(&mut self, index: u8, file: Option<File>) -> Result<()> {
        self.ring(index)?;
        never_wait(file.as_ref())?;
        self.calls.set_call(usize::from(index), file);
        // Buffers may have been used while there was nothing to call through.
        crate::virtio::Interrupt::signal_queue(&*self.calls, index.into());
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, file: Option<File>) -> Result<()> {
        self.ring(index)?;
        never_wait(file.as_ref())?;
        self.calls.set_err(usize::from(index), file);
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS)
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        let unknown = features & !self.get_protocol_features()?.bits();
        if unknown != 0 {
            return Err(refuse(invalid(format!(
                "protocol features {unknown:#x} were not offered"
            ))));
        }
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.rings.len() as u64)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.ring(index)?.enabled = enable;
        self.update()
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> Result<Vec<u8>> {
        if size > MAX_CONFIG {
            return Err(Error::InvalidParam);
        }
        let mut bytes = vec![0; size as usize];
        self.device.read_config(offset.into(), &mut bytes);
        Ok(bytes)
    }

    fn set_config(&mut self, offset: u32, buf: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        self.device.write_config(offset.into(), buf);
        Ok(())
    }

    fn set_backend_req_fd(&mut self, backend: Backend) {
        self.backend = Some(backend);
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(MAX_SLOTS as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        self.memory.add(region, file).map_err(refuse)?;
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let (guest, size) = (region.guest_phys_addr, region.memory_size);
        self.memory.remove(guest, size).map_err(refuse)
    }

    // None of these was offered.

    fn set_gpu_socket(&mut self, _gpu: GpuBackend) -> Result<()> {
        Err(Error::InvalidOperation("this is not a display"))
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        Err(Error::InvalidOperation("there are no shared objects"))
    }

    fn get_inflight_fd(
        &mut self,
        _inflight: &VhostUserInflight,
    ) -> Result<(VhostUserInflight, File)> {
        Err(Error::InvalidOperation(
            "in-flight tracking was not offered",
        ))
    }

    fn set_inflight_fd(&mut self, _inflight: &VhostUserInflight, _file: File) -> Result<()> {
        Err(Error::InvalidOperation(
            "in-flight tracking was not offered",
        ))
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _file: File,
    ) -> Result<Option<File>> {
        Err(Error::InvalidOperation("device state was not offered"))
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(Error::InvalidOperation("device state was not offered"))
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(Error::InvalidOperation("there is no shared memory"))
    }

    fn set_log_base(&mut self, _log: &VhostUserLog, _file: File) -> Result<()> {
        Err(Error::InvalidOperation("a dirty log was not offered"))
    }
}
