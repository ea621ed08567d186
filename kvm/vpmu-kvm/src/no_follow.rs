//! In place of `follow` without the feature `lbr`: nobody is followed.

use crate::error::Error;
use crate::offer::Offer;
use crate::options::Options;
use crate::pmu::VcpuPmu;
use crate::run::Kvm;

/// Nobody.
#[derive(Debug)]
pub(crate) enum Follower {}

impl Follower {
    pub(crate) fn attach(_: &Kvm, offer: &Offer, _: &Options) -> Result<Option<Self>, Error> {
        match offer.has_lbr() {
            true => Err(Error::Lbr(
                "this library was built without its feature `lbr`",
            )),
            false => Ok(None),
        }
    }

    pub(crate) fn forget(&mut self, _: &Kvm, _: &mut VcpuPmu) {
        match *self {}
    }

    pub(crate) fn before_run(&mut self, _: &Kvm, _: &mut VcpuPmu, _: bool) -> Result<(), Error> {
        match *self {}
    }

    pub(crate) fn replay(&mut self, _: &Kvm, _: &mut VcpuPmu) -> Result<(), Error> {
        match *self {}
    }

    pub(crate) fn after_run(&mut self, _: &Kvm, _: &mut VcpuPmu) -> Result<bool, Error> {
        match *self {}
    }
}
