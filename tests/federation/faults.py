"""The faults of a federation: what happens, what must follow, and the tests that try it.

``make lists`` counts the tries and writes the table of ``docs/federation.md``.
"""

from __future__ import annotations

FAULTS = (
    (
        "a site is killed before, in or after its training, or two at once",
        "it gets the same request when it is back; it does not train again if it has finished",
        "test_a_site_that_is_killed_trains_once_all_the_same test_a_site_that_is_killed_is_asked_again "
        "test_a_site_that_is_asked_twice_or_starts_again_each_time_gives_the_same "
        "test_what_failed_after_training_is_trained_from_the_same_state_when_asked_again "
        "test_half_a_line_of_a_crash_is_dropped",
    ),
    (
        "its supernode alone is killed",
        "the site starts it again; the superlink accepts it after up to a minute",
        "test_a_supernode_that_is_killed_comes_back",
    ),
    (
        "the superlink is killed",
        "start it again with the same database; the sites reconnect, and the server asks again",
        "test_a_superlink_that_is_killed_in_a_run_loses_nothing "
        "test_a_superlink_that_is_killed_and_started_again_loses_nothing "
        "test_the_start_waits_for_a_superlink_that_starts_again_and_for_a_key_that_comes_back",
    ),
    (
        "the server is killed or interrupted",
        "`fedlayers federation run --resume` continues from the last checkpoint, bit for bit",
        "test_a_server_killed_in_the_middle_goes_on_bit_for_bit "
        "test_a_server_that_is_killed_while_saving_goes_on_bit_for_bit "
        "test_ctrl_c_at_the_server_leaves_a_run_that_goes_on_and_no_process "
        "test_a_choice_that_was_stopped_goes_on_over_the_sites test_a_run_with_a_secure_sum_resumes_with_one",
    ),
    (
        "a site is late, or does not return",
        "the server waits; with `--min-sites` and `--grace` it continues without the site until that returns",
        "test_a_late_site_is_waited_for test_a_late_site_is_waited_for_or_left_out "
        "test_who_does_not_answer_is_left_out_and_named_as_a_lost_reply_is "
        "test_the_least_number_of_replies_is_waited_for test_a_site_that_does_not_answer_costs_its_grace "
        "test_a_site_that_is_lost_at_the_start_ends_the_wait",
    ),
    (
        "a message is lost, a request is repeated, or an answer comes twice",
        "the server asks again and counts one answer; the site trains once, and draws noise once",
        "test_what_is_asked_and_answered_twice_is_trained_once test_a_message_whose_run_ends_is_given_to_nobody "
        "test_a_part_that_is_on_its_way_is_asked_for_again test_two_servers_at_once_do_not_mix_their_replies "
        "test_a_repeated_request_is_spent_once test_measured_twice_is_answered_from_disk_and_spent_once "
        "test_what_an_earlier_server_asked_is_not_done_again test_a_refusal_of_an_earlier_request_does_not_end_a_run "
        "test_a_site_answers_each_step_once test_replies_that_a_trace_loses_are_lost_over_sites_too",
    ),
    (
        "a message of the server is forged or damaged",
        "the site refuses it by name and changes nothing",
        "test_a_hostile_server_is_refused_by_a_site test_a_site_does_not_do_what_it_is_asked_out_of_turn "
        "test_any_value_of_any_field_is_refused_by_name_or_answered_within_the_limits "
        "test_any_option_of_an_algorithm_is_refused_by_name_or_answered test_every_hostile_value_of_an_option "
        "test_code_of_the_servers_choice_is_not_imported test_what_somebody_else_sent_is_no_payload "
        "test_work_is_for_the_plan_and_the_rounds_that_joined "
        "test_work_is_for_the_algorithm_and_options_that_joined",
    ),
    (
        "a message of a site is forged or damaged",
        "the server refuses it with the site's name and stores no round from it",
        "test_a_hostile_site_is_told_of_by_name_and_changes_nothing "
        "test_a_site_forges_no_rows_where_an_algorithm_observes_nothing "
        "test_rows_that_are_not_a_sites_own_numbers_are_refused "
        "test_scores_alone_come_back_where_scores_are_asked_for test_a_hostile_site_makes_no_sum "
        "test_forged_keys_are_refused test_forged_shares_and_survivors_are_refused",
    ),
    (
        "sites are lost within a secure sum",
        "the sum is that of the sites that stayed; with too few of them nothing is revealed",
        "test_in_1000_patterns_of_dropouts_the_sum_is_exactly_that_of_the_survivors "
        "test_a_site_that_is_lost_at_any_step_leaves_the_survivors_mean "
        "test_too_few_sites_end_in_one_error_and_reveal_nothing",
    ),
    (
        "an unknown key, another authority or secret, no superlink, a port in use",
        "refused in one line, and no process is left",
        "test_who_is_not_known_is_refused_in_one_line test_another_authority_is_told_from_nobody_there "
        "test_only_who_says_the_word_starts_runs_and_registers_keys "
        "test_a_request_of_unknown_or_too_large_size_is_refused test_a_file_of_keys_that_cannot_be_read_is_named",
    ),
    (
        "another version, model or data",
        "refused in one line, with the name of the site",
        "test_another_version_or_model_is_refused_in_one_line test_what_does_not_fit_is_refused_at_hello "
        "test_a_site_of_another_model_is_refused test_another_dataset_than_the_sites_have_is_refused "
        "test_sites_of_other_vocabularies_do_not_fit_together "
        "test_a_forged_or_damaged_directory_of_a_federation_is_refused",
    ),
    (
        "a wrong clock, or a proxy on the way",
        "a clock is refused in one line with the difference in seconds; a proxy is used for other machines only",
        "test_a_clock_that_is_a_minute_ahead_is_named test_a_clock_that_is_off_is_measured "
        "test_a_proxy_is_for_other_machines_alone "
        "test_a_site_reaches_its_superlink_through_a_proxy_and_its_supernode_without",
    ),
    (
        "the disk of a site is full at any of its writes",
        "the site reports a failure, and nothing leaves; asked again with free space, it gives the same bits",
        "test_a_full_disk_at_a_site_fails_and_asking_again_gives_the_same "
        "test_a_full_disk_leaves_a_list_that_can_be_continued test_what_cannot_be_written_down_does_not_leave",
    ),
    (
        "the list of what has left, or of answers, is damaged",
        "`fedlayers federation audit` names the line; a damaged list is no reason for a new answer",
        "test_a_list_that_was_changed_is_refused test_a_list_that_was_cut_or_written_anew_lacks_a_noted_line "
        "test_a_damaged_account_is_no_reason_to_spend_anew test_a_damaged_audit_is_no_reason_to_answer_anew",
    ),
    (
        "a request asks for too much memory, disk, time or training",
        "refused with the name of the limit; the site answers the next request as before",
        "test_a_model_or_training_that_is_too_large_is_refused_at_once test_epochs_of_an_algorithms_own_are_limited "
        "test_work_that_takes_too_long_is_interrupted_and_the_site_goes_on "
        "test_memory_is_limited_by_the_operating_system test_many_runs_do_not_fill_the_disk_of_a_site",
    ),
)  # fmt: skip
"""What happens, what must follow, and the names of the tests, of :mod:`tests.federation` and its folders."""
