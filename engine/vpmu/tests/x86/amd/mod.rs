//! Tests of AMD's model.

mod behaviour;
mod model;
mod reference;
mod registers;
mod state;
