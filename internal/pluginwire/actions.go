package pluginwire

// Actions of every connection.
const (
	ActionPing         = "__ping"
	ActionHeartbeat    = "__heartbeat" // no peer answers it
	ActionFileChunk    = "__file_chunk"
	ActionCancelAction = "__cancel_action" // since 0.7
	ActionStreamAck    = "__stream_ack"    // since 0.7
)

// Actions from LangBot to the Runtime. Some go on to a worker under the same name.
const (
	ActionSetRuntimeConfig             = "set_runtime_config"
	ActionReconcilePluginInstallations = "reconcile_plugin_installations"
	ActionApplyPluginInstallation      = "apply_plugin_installation"
	ActionRemovePluginInstallation     = "remove_plugin_installation"
	ActionGetDebugInfo                 = "get_debug_info"
	ActionGetStorageAnalysis           = "get_storage_analysis" // since 0.7
	ActionListPlugins                  = "list_plugins"
	ActionGetPluginInfo                = "get_plugin_info"
	ActionGetPluginIcon                = "get_plugin_icon"
	ActionGetPluginReadme              = "get_plugin_readme"
	ActionGetPluginLogs                = "get_plugin_logs"
	ActionGetPluginAssetsFile          = "get_plugin_assets_file"
	ActionInstallPlugin                = "install_plugin"
	ActionRestartPlugin                = "restart_plugin"
	ActionDeletePlugin                 = "delete_plugin"
	ActionUpgradePlugin                = "upgrade_plugin"
	ActionEmitEvent                    = "emit_event"
	ActionPluginDiagnostic             = "plugin_diagnostic"
	ActionListTools                    = "list_tools"
	ActionCallTool                     = "call_tool"
	ActionListCommands                 = "list_commands"
	ActionExecuteCommand               = "execute_command"
	ActionListAgentRunners             = "list_agent_runners" // 4.11 development line
	ActionListRunners                  = "list_runners"       // since 0.6
	ActionRunAgent                     = "run_agent"          // 4.11 development line
	ActionRunRunner                    = "run_runner"         // since 0.6
	ActionRetrieveKnowledge            = "retrieve_knowledge"
	ActionListKnowledgeEngines         = "list_knowledge_engines"
	ActionRAGIngestDocument            = "rag_ingest_document"
	ActionRAGDeleteDocument            = "rag_delete_document"
	ActionRAGOnKBCreate                = "rag_on_kb_create"
	ActionRAGOnKBDelete                = "rag_on_kb_delete"
	ActionGetRAGCreationSettings       = "get_rag_creation_settings_schema"
	ActionGetRAGRetrievalSettings      = "get_rag_retrieval_settings_schema"
	ActionListParsers                  = "list_parsers"
	ActionParseDocument                = "parse_document"
	ActionPageAPI                      = "page_api"
)

// Actions from the Runtime to a worker, beside those above.
const (
	ActionInitializePlugin       = "initialize_plugin"
	ActionAttachPluginSlot       = "attach_plugin_slot"        // since 0.6.3
	ActionDetachPluginSlot       = "detach_plugin_slot"        // since 0.6.3
	ActionGetPluginSlotContainer = "get_plugin_slot_container" // since 0.6.3
	ActionGetPluginContainer     = "get_plugin_container"
	ActionIngestDocument         = "ingest_document"
	ActionDeleteDocument         = "delete_document"
	ActionOnKBCreate             = "on_kb_create"
	ActionOnKBDelete             = "on_kb_delete"
	ActionGetRAGCapabilities     = "get_rag_capabilities"
	ActionShutdown               = "shutdown"
	ActionBuildPluginPackage     = "build_plugin_package" // some 0.7 workers
	ActionGitSyncPlugin          = "git_sync_plugin"      // some 0.7 workers
)

// Actions from a worker to the Runtime, beside those above. All but the first two
// go on to LangBot.
const (
	ActionRegisterPlugin             = "register_plugin"
	ActionListPluginsManifest        = "list_plugins_manifest"
	ActionReplyMessage               = "reply_message"
	ActionGetBotUUID                 = "get_bot_uuid"
	ActionSetQueryVar                = "set_query_var"
	ActionGetQueryVar                = "get_query_var"
	ActionGetQueryVars               = "get_query_vars"
	ActionCreateNewConversation      = "create_new_conversation"
	ActionGetLangbotVersion          = "get_langbot_version"
	ActionGetBots                    = "get_bots"
	ActionGetBotInfo                 = "get_bot_info"
	ActionSendMessage                = "send_message"
	ActionCallPlatformAPI            = "call_platform_api"
	ActionReplyStream                = "reply_stream"
	ActionGetLLMModels               = "get_llm_models"
	ActionCountTokens                = "count_tokens"
	ActionInvokeLLM                  = "invoke_llm"
	ActionInvokeLLMStream            = "invoke_llm_stream"
	ActionInvokeEmbedding            = "invoke_embedding"
	ActionInvokeRerank               = "invoke_rerank"
	ActionVectorUpsert               = "vector_upsert"
	ActionVectorSearch               = "vector_search"
	ActionVectorDelete               = "vector_delete"
	ActionVectorList                 = "vector_list"
	ActionGetKnowledgeFileStream     = "get_knowledge_file_stream"
	ActionListKnowledgeBases         = "list_knowledge_bases"
	ActionListPipelineKnowledgeBases = "list_pipeline_knowledge_bases"
	ActionRetrieveKnowledgeBase      = "retrieve_knowledge_base"
	ActionInvokeParser               = "invoke_parser"
	ActionGetConfigFile              = "get_config_file"
	ActionGetToolDetail              = "get_tool_detail"
	ActionSetPluginStorage           = "set_plugin_storage"
	ActionGetPluginStorage           = "get_plugin_storage"
	ActionGetPluginStorageKeys       = "get_plugin_storage_keys"
	ActionDeletePluginStorage        = "delete_plugin_storage"
	ActionSetWorkspaceStorage        = "set_workspace_storage"
	ActionGetWorkspaceStorage        = "get_workspace_storage"
	ActionGetWorkspaceStorageKeys    = "get_workspace_storage_keys"
	ActionDeleteWorkspaceStorage     = "delete_workspace_storage"
	ActionGetBoxStatus               = "get_box_status"
	ActionListBoxes                  = "list_boxes"
	ActionAcquireBox                 = "acquire_box"
	ActionBindBox                    = "bind_box"
	ActionImportBoxAttachments       = "import_box_attachments"
	ActionExportBoxFiles             = "export_box_files"
	ActionGetPrompt                  = "get_prompt"
	ActionHistoryPage                = "history_page"
	ActionHistorySearch              = "history_search"
	ActionEventGet                   = "event_get"
	ActionEventPage                  = "event_page"
	ActionSteeringPull               = "steering_pull"
	ActionStateGet                   = "state_get"
	ActionStateSet                   = "state_set"
	ActionStateDelete                = "state_delete"
	ActionStateList                  = "state_list"
	ActionRunGet                     = "run_get"
	ActionRunList                    = "run_list"
	ActionRunEventsPage              = "run_events_page"
	ActionRunCancel                  = "run_cancel"
	ActionRunAppendResult            = "run_append_result"
	ActionRunFinalize                = "run_finalize"
	ActionRunClaim                   = "run_claim"
	ActionRunRenewClaim              = "run_renew_claim"
	ActionRunReleaseClaim            = "run_release_claim"
	ActionRunnerList                 = "runner_list"
	ActionRuntimeRegister            = "runtime_register"
	ActionRuntimeHeartbeat           = "runtime_heartbeat"
	ActionRuntimeList                = "runtime_list"
	ActionRuntimeReconcile           = "runtime_reconcile"
	ActionRunStats                   = "run_stats"
	ActionRuntimeStats               = "runtime_stats"
	ActionRunnerStats                = "runner_stats"
)

// Actions of the Runtime itself toward LangBot.
const (
	ActionInitializePluginSettings = "initialize_plugin_settings"
	ActionGetPluginSettings        = "get_plugin_settings"
	ActionSetBinaryStorage         = "set_binary_storage"
	ActionGetBinaryStorage         = "get_binary_storage"
	ActionGetBinaryStorageKeys     = "get_binary_storage_keys"
	ActionDeleteBinaryStorage      = "delete_binary_storage"
)

// Actions from a runner of a plugin that is granted processes. The Runtime answers
// them itself; they are not part of the published SDK.
const (
	ActionOpenRunProcess  = "open_run_process"
	ActionWriteRunProcess = "write_run_process"
	ActionReadRunProcess  = "read_run_process"
	ActionGetRunProcess   = "get_run_process"
	ActionCloseRunProcess = "close_run_process"
)
