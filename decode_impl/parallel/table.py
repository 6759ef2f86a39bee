"""All parts of all protocols by name. Programs find one another here, so one can be replaced from outside."""

from __future__ import annotations

from decode_impl.parallel import host_programs, launch_programs, programs, protocol, sentinel
from decode_impl.parallel.programs import Parts

_BARRIERS = ("exit_barrier", "broadcast_ready", "broadcast_done", "plan_ready", "plan_done", "cluster_exit")
"""Barriers with names of their own, because each of them can be forgotten."""

PROTOCOL: Parts = {
    function.__name__: function
    for function in (
        protocol.next_epoch,
        protocol.slot,
        protocol.flag_value,
        protocol.is_ready,
        protocol.mail_index,
        protocol.rearmed_slot,
        protocol.sendable,
        protocol.has_arrived,
        protocol.ring_slot,
        protocol.has_landed,
        protocol.may_overwrite,
        programs.send,
        programs.await_flag,
        programs.receive,
        programs.barrier,
        programs.rearm,
        programs.one_shot,
        programs.two_shot,
        programs.in_place,
        programs.mail_without_flags,
        programs.agree,
        sentinel.mail_words,
        launch_programs.broadcast,
        launch_programs.planner,
        launch_programs.layer_chain,
        launch_programs.publish_layer,
        launch_programs.partial_sums,
        launch_programs.leave_partial,
        launch_programs.sum_partials,
        launch_programs.add_partial,
        launch_programs.read_sum,
        launch_programs.split_partial,
        launch_programs.as_partial,
        launch_programs.dependent_launch,
        launch_programs.dependency_wait,
        launch_programs.cluster_read,
        host_programs.counts_to_host,
        host_programs.staging,
        host_programs.two_streams,
        host_programs.join,
    )
} | dict.fromkeys(_BARRIERS, programs.barrier)
"""The parts as they are meant to be."""


def collectives() -> Parts:
    """The protocols of an engine's collectives: a part of it like any other."""
    return PROTOCOL
