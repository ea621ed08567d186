//! The parts of a vCPU that answer its guest's accesses.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vpmu::counter::CounterHost;
use vpmu::x86::{CounterConfig, Outcome, Ring};

use crate::deadline::Deadline;
use crate::pmu::Core;
use crate::{Exit, Statistics};

/// The parts of a vCPU.
#[derive(Debug)]
pub(crate) struct Parts<H> {
    pub(crate) pmu: Option<Core<H>>,
    pub(crate) deadline: Option<Arc<Deadline>>,
    pub(crate) statistics: Arc<Mutex<Statistics>>,
}

impl<H: CounterHost<CounterConfig>> Parts<H> {
    pub(crate) fn new(pmu: Option<Core<H>>, deadline: Option<Arc<Deadline>>) -> Self {
        let statistics = match &pmu {
            Some(pmu) => pmu.shared_statistics(),
            // Exits are counted without a PMU, too: the VMM compares guests with and without one.
            None => Arc::default(),
        };
        Self {
            pmu,
            deadline,
            statistics,
        }
    }

    pub(crate) fn count(&self, exit: Exit) {
        self.statistics().count(exit);
    }

    pub(crate) fn statistics(&self) -> MutexGuard<'_, Statistics> {
        let statistics = self.statistics.lock();
        statistics.unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn rdmsr(&mut self, index: u32) -> Outcome {
        let of_pmu = self.pmu.as_mut().map(|pmu| pmu.rdmsr(index));
        self.or_of_deadline(of_pmu, Exit::MsrRead(index), |deadline| {
            deadline.rdmsr(index)
        })
    }

    pub(crate) fn wrmsr(&mut self, index: u32, value: u64) -> Outcome {
        let of_pmu = self.pmu.as_mut().map(|pmu| pmu.wrmsr(index, value));
        self.or_of_deadline(of_pmu, Exit::MsrWrite(index), |deadline| {
            deadline.wrmsr(index, value)
        })
    }

    pub(crate) fn rdpmc(&mut self, index: u32, ring: Ring) -> Outcome {
        let pmu = self.pmu.as_mut();
        pmu.map_or(Outcome::NotHandled, |pmu| pmu.rdpmc(index, ring))
    }

    fn or_of_deadline(
        &self,
        of_pmu: Option<Outcome>,
        exit: Exit,
        of_deadline: impl FnOnce(&Deadline) -> Outcome,
    ) -> Outcome {
        // The PMU is asked first: nearly all accesses are for it.
        let (None | Some(Outcome::NotHandled), Some(deadline)) = (of_pmu, &self.deadline) else {
            return of_pmu.unwrap_or(Outcome::NotHandled);
        };
        let outcome = of_deadline(deadline);
        // The PMU's accesses are counted where its calls are noted.
        if outcome != Outcome::NotHandled {
            self.count(exit);
        }
        outcome
    }
}
