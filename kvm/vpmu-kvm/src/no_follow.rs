//! In place of `follow` without the feature `lbr`: nobody is followed, and nothing is executed for a guest.

use std::sync::Arc;

use vpmu_perf::PerfHost;

use crate::error::Error;
use crate::kvm::OnKvm;
use crate::memory::GuestMemory;
use crate::offer::Offer;
use crate::options::Options;
use crate::pmu::VcpuPmu;

/// Nobody.
#[derive(Debug)]
pub(crate) enum Follower {}

impl Follower {
    pub(crate) fn attach(
        _: &OnKvm,
        offer: &Offer,
        _: Arc<dyn GuestMemory>,
        _: &Options,
    ) -> Result<Option<Self>, Error> {
        match offer.has_lbr() {
            true => Err(Error::Lbr(
                "this library was built without its feature `lbr`",
            )),
            false => Ok(None),
        }
    }

    pub(crate) fn forget(&mut self, _: &OnKvm, _: &mut VcpuPmu<PerfHost>) {
        match *self {}
    }

    pub(crate) fn is_wanted(&mut self, _: &mut VcpuPmu<PerfHost>) -> bool {
        match *self {}
    }

    pub(crate) fn before_run(&mut self, _: &OnKvm, _: &mut VcpuPmu<PerfHost>) -> Result<(), Error> {
        match *self {}
    }

    pub(crate) fn after_run(
        &mut self,
        _: &OnKvm,
        _: &mut VcpuPmu<PerfHost>,
    ) -> Result<bool, Error> {
        match *self {}
    }
}

/// None.
#[derive(Debug)]
pub(crate) enum Replays {}

impl Replays {
    pub(crate) fn attach(_: &Offer, _: Arc<dyn GuestMemory>, _: &Options) -> Option<Self> {
        None
    }

    pub(crate) fn note(&mut self, _: &OnKvm, _: &VcpuPmu<PerfHost>) {
        match *self {}
    }

    pub(crate) fn forget(&mut self) {
        match *self {}
    }

    pub(crate) fn is_wanted(&self) -> bool {
        match *self {}
    }

    pub(crate) fn completed(&mut self) {
        match *self {}
    }

    pub(crate) fn run(&mut self, _: &mut OnKvm, _: &mut VcpuPmu<PerfHost>) -> Result<(), Error> {
        match *self {}
    }
}
