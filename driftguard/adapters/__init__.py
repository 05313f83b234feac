"""What serving engines tell about speculative decoding, as acceptance records: one file per engine.

Everything here is pure: text in, counts out. `driftguard.scraping` fetches the text.
"""
